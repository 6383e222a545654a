"""Which sizes, meshes and strategies fit a model, and how fast they are: many plans, each a row, resumable."""
