"""Codegen: the program of one rank under an assignment."""
