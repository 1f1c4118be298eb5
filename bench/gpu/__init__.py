"""What ``bench/gpu_check.py`` is made of."""
