"""What requests and answers look like: one module an API, pydantic models only."""
