"""Plans side by side, as figures, as traces, and simulated."""
