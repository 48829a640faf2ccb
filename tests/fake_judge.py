"""A scripted OpenAI-compatible server on a real socket, for what a judge may do to those who ask it."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeJudge:
    """Answers each chat request with `act(body, number)`, which returns one of

        "1" or any other text     a completion that says it, with logprobs
        ("text", "1")             the same without logprobs
        ("slow", seconds, action) an action, later
        ("status", 429, headers)  an error
        ("body", bytes)           200 with this body
        "drop"                    the connection closes without a word

    `requests` are the bodies in order, `most` the largest number of requests at a time.
    """

    def __init__(self, act, models=("judge-72b",)):
        self.act, self.models = act, list(models)
        self.requests, self.listed, self.now, self.most = [], 0, 0, 0
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def send(self, status, body, headers=()):
                body = body if isinstance(body, bytes) else json.dumps(body).encode()
                head = {"Content-Type": "application/json", "Content-Length": str(len(body)), **dict(headers)}
                lines = [f"HTTP/1.1 {status} X", *(f"{k}: {v}" for k, v in head.items()), "", ""]
                self.wfile.write("\r\n".join(lines).encode() + body)

            def do_GET(self):
                outer.listed += 1
                self.send(200, {"object": "list", "data": [{"id": m, "object": "model"} for m in outer.models]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    number = len(outer.requests)
                    outer.requests.append(body)
                    outer.now += 1
                    outer.most = max(outer.most, outer.now)
                try:
                    self.carry_out(outer.act(body, number), body)
                finally:
                    with outer.lock:
                        outer.now -= 1

            def carry_out(self, action, body):
                if isinstance(action, tuple) and action[0] == "slow":
                    time.sleep(action[1])
                    action = action[2]
                if body["model"] not in outer.models:
                    self.send(404, {"error": {"message": f"The model `{body['model']}` does not exist.", "code": 404}})
                elif action == "drop":
                    self.close_connection = True
                    self.connection.close()
                elif isinstance(action, tuple) and action[0] == "status":
                    self.send(action[1], {"error": {"message": f"status {action[1]}"}}, action[2])
                elif isinstance(action, tuple) and action[0] == "body":
                    self.send(200, action[1])
                else:
                    text, logprobs = (action, True) if isinstance(action, str) else (action[1], False)
                    token = {"token": text, "logprob": -0.01, "bytes": None}
                    choice = {"index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": text}}
                    choice["logprobs"] = {"content": [{**token, "top_logprobs": [token]}]} if logprobs else None
                    self.send(200, {"id": "x", "object": "chat.completion", "created": 0, "choices": [choice]})

        class Server(ThreadingHTTPServer):
            request_queue_size, daemon_threads = 256, True

            def handle_error(self, request, client_address):  # the client left, or we closed its connection
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.server.shutdown()
        self.server.server_close()
