"""`wandb sync` uploads the directories of an interrupted run: one run, every step once. A stand-in plays the server,
with the few answers of W&B's API that a sync needs."""

import gzip
import http.server
import json
import os
import subprocess
import sys
import threading

import pytest
import wandb

from lowprec_train.train.logging import wandb_files
from tests.train.logging.test_wandb import launch


class Server(http.server.BaseHTTPRequestHandler):
    """Knows one run by the lines of its history; the class attributes are the server's memory."""

    protocol_version = "HTTP/1.1"
    history: list
    runs: list

    def do_POST(self):
        asked = json.loads(self.body())
        if "file_stream" in self.path:
            return self.answer(self.take(asked.get("files", {})))
        self.answer({"data": self.graphql(asked["query"], asked.get("variables") or {})})

    def do_PUT(self):
        self.body()
        self.answer({})

    def body(self):
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data

    def answer(self, content):
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def take(self, files):
        """History goes where its offset says, as a server that keeps lines by number would have it."""
        sent = files.get("wandb-history.jsonl")
        if sent:
            assert sent["offset"] <= len(self.history)
            self.history[sent["offset"] :] = [json.loads(line) for line in sent["content"]]
        return {"exitcode": None, "limits": {}}

    def graphql(self, query, given):
        project = {"id": "p", "name": "lowprec_train", "entity": {"id": "e", "name": "team"}}
        here = f"http://127.0.0.1:{self.server.server_address[1]}/"
        if "RunResumeStatus" in query:
            return {"model": {**project, "bucket": self.known() if self.history else None}}
        if "UpsertBucket" in query:
            self.runs.append({key: given[key] for key in ("name", "groupName", "jobType") if given.get(key)})
            run = {"id": "r", "name": given["name"], "displayName": "r", "config": "{}", "sweepName": None}
            return {"upsertBucket": {"bucket": {**run, "project": project}, "inserted": not self.history}}
        if "CreateRunFiles" in query:
            files = [{"name": name, "uploadUrl": here + name} for name in given["files"]]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        return {"viewer": {"id": "u", "entity": "team", "username": "u", "flags": "{}"}, "serverInfo": None}

    def known(self):
        last = json.dumps(self.history[-1])
        counts = {"historyLineCount": len(self.history), "logLineCount": 0, "eventsLineCount": 0}
        tails = {"summaryMetrics": last, "historyTail": json.dumps([last]), "eventsTail": "[]"}
        about = {"id": "r", "name": "r", "displayName": "r", "config": "{}", "tags": [], "wandbConfig": '{"t": {}}'}
        return about | counts | tails

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    Server.history, Server.runs = [], []
    serving = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=serving.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{serving.server_address[1]}"
    serving.shutdown()
    thread.join()


def test_launches_that_were_torn_and_resumed_arrive_as_one_run(server, tmp_path):
    """The first launch is torn within step 6, saved at 4; the second goes to 9, saved at 7; the third to 11."""
    run, remembered = tmp_path / "r", {}
    run.mkdir()
    for steps, resumed in ((range(1, 7), 0), (range(5, 10), 4), (range(8, 12), 7)):
        for sink in launch(run, steps, remembered=remembered, resumed_step=resumed):
            sink.close()
        wandb.teardown()
        (file, *later) = wandb_files.files(run)
        if not later:
            whole = file.read_bytes()
            points = [end for record, end in wandb_files.records(whole) if b"_runtime" in record and b"_step" in record]
            file.write_bytes(whole[: points[-2] + 3])
            assert len(wandb_files.history(file)) == 5
    directories = [str(file.parent) for file in wandb_files.files(run)]
    environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    environment |= {"WANDB_BASE_URL": server, "WANDB_API_KEY": "a" * 40, "WANDB_ERROR_REPORTING": "false"}
    sync = [sys.executable, "-m", "wandb", "sync", *directories]
    ended = subprocess.run(sync, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and "ERROR" not in ended.stderr, ended.stderr
    assert [point["_step"] for point in Server.history] == list(range(1, 12))
    assert [point["train/loss"] for point in Server.history] == [step / 3 for step in range(1, 12)]
    assert all(file.with_name(f"{file.name}.synced").exists() for file in wandb_files.files(run))
    begun = [about for about in Server.runs if "jobType" in about]
    assert begun == 3 * [{"name": remembered["wandb_run_id"], "groupName": "c-1", "jobType": "fp4"}]
