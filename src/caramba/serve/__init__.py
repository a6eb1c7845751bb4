"""A model behind an OpenAI-compatible HTTP interface, many requests at a time in one engine."""
