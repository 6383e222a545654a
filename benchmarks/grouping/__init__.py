"""Smaller problems: variables of given groups joined into one, with their joint options."""
