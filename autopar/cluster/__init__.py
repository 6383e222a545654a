"""Devices, links and what collectives take on them."""
