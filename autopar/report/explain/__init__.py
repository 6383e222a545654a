"""Answers to "why is this planned so?": alternatives, what each costs, and what speaks against it."""
