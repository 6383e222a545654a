"""What operators' dims mean, and how an op runs on shards."""
