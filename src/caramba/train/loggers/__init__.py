"""Where the metrics of a phase go. events.jsonl is the record; every other stream is made from the same rows."""
