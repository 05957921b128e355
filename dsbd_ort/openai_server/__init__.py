"""OpenAI's HTTP interface over a Service; the only package that imports FastAPI and uvicorn."""
