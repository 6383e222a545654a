"""Trainers of other libraries, which hold a parallel module as they hold a model. Each file imports its library, and
none is imported before you do: `from autopar.integrations.transformers import Trainer`."""
