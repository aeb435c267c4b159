"""kvloom: a KV-caching engine for LLM inference."""
