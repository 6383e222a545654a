"""Optional machinery that nothing imports: each file plugs itself into a table when that is first read (`EXTRAS`)."""
