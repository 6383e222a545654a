"""From a captured model to a plan: the search, its limit, presets, constraints, and the plan."""
