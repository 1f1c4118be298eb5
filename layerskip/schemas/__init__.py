"""JSON schemas as what a grammar can hold to: read, rewritten, merged, written."""
