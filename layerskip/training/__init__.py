"""Losses and schedules that make early exits worth taking. Pure functions of tensors."""
