"""What was measured: the database, and the programs of segments that are measured."""
