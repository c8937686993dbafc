"""Models that somebody else serves: OpenAI-compatible servers and KServe v2, attached to and left as they were."""
