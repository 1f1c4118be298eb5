"""What decoding did: sinks for its rounds, runs folders, reports, decisions, drift."""
