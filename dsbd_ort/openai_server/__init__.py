"""OpenAI-compatible HTTP server over a Service; the only package that imports FastAPI and uvicorn.

A request passes through, in this order:

    server.py               sockets and connections; draining on SIGTERM
    middleware.py           access log, body size and time, authentication
    app.py                  the endpoints
    request_fields.py       the table of unused request fields: accepted, refused
    protocol.py             request fields and response parts of both endpoints
    chat.py completions.py  request and response of one endpoint each
    item_requests.py        request of /v1/responses, read as a chat; item_responses.py: its answer
    planner.py              request body -> engine requests; settings.py: their limits
    generation.py           engine requests of one HTTP request, run and cancelled together
    responses.py            engine results -> one response or a stream of chunks
    transcription.py        the form of a request with audio, and its lifecycle
    errors.py  metrics.py   error responses; /metrics

To add a request field, declare it in ``GenerationBody`` (or in one endpoint's body); planner.py
turns it into options. To add a response field, declare it in a model of chat.py or completions.py;
the builder in the same file fills it in.
"""
