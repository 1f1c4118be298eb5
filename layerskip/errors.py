"""Errors with a name of their own. Other user mistakes are plain ValueError or TypeError."""


class UnsupportedModelError(ValueError):
    """The model does not fit; raised before anything is built, with the reason."""
