"""What may be chosen: strategies of operators, the sites where they meet, and the problem that solvers read."""
