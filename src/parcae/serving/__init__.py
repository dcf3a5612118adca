"""An OpenAI-compatible server for looped models, with depth as a parameter of every request.

server      serve, the library call: listens, drains on SIGTERM
app         create_app, the library call: routes from HTTP to the scheduler
protocol    requests in OpenAI's format and their limits; format of errors
responses   generated tokens in OpenAI's format: responses, chunks of a stream, logprobs
models      models by name, with their chat templates
generation  the texts of a request, from the scheduler to the event loop
scheduler   the thread that owns an engine: fair queue (429 if full), retries, time limits (504)
security    API keys, host and origin, size of bodies, headers
metrics     counters in Prometheus' text format
settings    limits and sizes of a server
page/       the web page: page.js has the text and its colours, inspector.js one token by loop
"""
