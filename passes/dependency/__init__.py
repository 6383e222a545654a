"""Which elements of an operand an element of a result depends on (CFP section 3.2)."""
