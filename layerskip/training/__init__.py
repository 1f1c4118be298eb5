"""Losses and schedules that make early exits worth taking. What is no function of
tensors alone, layer dropout, holds a model's layers for as long as a ``with`` block lasts."""
