"""Commands of the command line that are not in ``layerskip.cli``."""
