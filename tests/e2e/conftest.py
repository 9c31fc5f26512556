"""What the end-to-end tests share: models made by `tandem synth`, and bundles that a test starts."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request

import openai
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("TANDEM_BIN", ROOT / "build" / "bin")).resolve()
TANDEM = BIN / "tandem"
START_S = 120  # a bundle under a sanitizer on a loaded machine
STOP_S = 60
READY = re.compile(r"tandem: ready at (http://\S+)")


def run_tandem(*args, timeout=START_S):
    """Runs a command to its end; (exit status, standard output, standard error)."""
    done = subprocess.run([TANDEM, *map(str, args)], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=timeout)
    return done.returncode, done.stdout, done.stderr


def settings_to_args(settings):
    return [arg for key, value in settings.items() for arg in ("--set", f"{key}={value}")]


def process_tree(pid):
    """The pid and those of all its descendants."""
    parents = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
    tree = [pid]
    for known in tree:
        tree += [child for child, parent in parents.items() if parent == known]
    return tree


def process_name(pid):
    return pathlib.Path(os.readlink(f"/proc/{pid}/exe")).name


def memory_bytes(pid, field):
    """VmRSS, VmHWM, RssAnon ... of a process."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(rf"^{field}:\s+(\d+) kB", status, re.M).group(1)) * 1024


def cpu_seconds(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Bundle:
    """A running `tandem serve`; everything it starts is its own session and ends with it."""

    def __init__(self, config, settings, log):
        self.log = log
        settings = {"router.port": 0, **settings}
        with open(log, "wb") as stderr:
            self.process = subprocess.Popen(
                [TANDEM, "serve", config, *settings_to_args(settings)], stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True)
        self.known = {self.process.pid}
        self.url = None
        self.output = []
        self.ready = threading.Event()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.output.append(line)
            found = READY.match(line)
            if found:
                self.url = found.group(1)
                self.ready.set()
        self.ready.set()

    def wait_ready(self):
        in_time = self.ready.wait(START_S)
        assert self.url, f"not ready{'' if in_time else ' in time'}:\n{self.errors()}"
        self.known |= set(process_tree(self.process.pid))
        return self

    def errors(self):
        return pathlib.Path(self.log).read_text(errors="replace")

    def pids(self):
        """Processes by the name of their executable."""
        result = {}
        for pid in process_tree(self.process.pid):
            result.setdefault(process_name(pid), []).append(pid)
        return result

    def client(self, **kwargs):
        return openai.OpenAI(base_url=self.url + "/v1", api_key=kwargs.pop("api_key", "none"),
                             max_retries=0, timeout=STOP_S, **kwargs)

    def http(self, method, path, body=None, headers=None):
        """(status, headers, body) of one plain request; body is bytes or something for JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, method=method,
                                         headers={"content-type": "application/json", **(headers or {})})
        try:
            with urllib.request.urlopen(request, timeout=STOP_S) as response:
                return response.status, response.headers, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.headers, error.read()

    def metrics(self):
        """Sums over the labels of every metric, by name without the prefix tandem_."""
        status, _, body = self.http("GET", "/metrics")
        assert status == 200
        sums = {}
        for line in body.decode().splitlines():
            found = re.match(r"tandem_(\w+)(?:\{[^}]*\})? (\S+)$", line)
            if found:
                sums[found.group(1)] = sums.get(found.group(1), 0) + float(found.group(2))
        return sums

    def wait_metric(self, name, holds, seconds=5):
        """Workers report what they hold in their own time, so a gauge may lag a little."""
        end = time.monotonic() + seconds
        while not holds(self.metrics()[name]) and time.monotonic() < end:
            time.sleep(0.02)
        value = self.metrics()[name]
        assert holds(value), f"{name} is {value}"

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)

    def wait(self, seconds=STOP_S):
        """Exit status once it has ended."""
        status = self.process.wait(seconds)
        self.reader.join(seconds)
        return status

    def kill(self):
        """Ends what is left; every process of the bundle is in the session it began."""
        if self.process.poll() is None:
            self.known |= set(process_tree(self.process.pid))
        for pid in self.known:
            with contextlib.suppress(OSError):
                if os.getsid(pid) == self.process.pid:
                    os.kill(pid, signal.SIGKILL)
        self.process.wait(STOP_S)

    def survivors(self):
        return [pid for pid in self.known if pathlib.Path(f"/proc/{pid}").exists()]


@pytest.fixture(scope="session")
def start(tmp_path_factory):
    """start(model, {key: value}) gives a ready bundle; wait=False gives one that is starting."""
    bundles = []

    def start_bundle(model, settings=None, wait=True, config=None):
        directory = tmp_path_factory.mktemp("bundle")
        if config is None:
            config = directory / "bundle.json"
            config.write_text(json.dumps({"model": str(model)}))
        bundle = Bundle(config, settings or {}, directory / "stderr.log")
        bundles.append(bundle)
        return bundle.wait_ready() if wait else bundle

    yield start_bundle
    try:
        for bundle in bundles:
            if bundle.url and bundle.process.poll() is None:
                bundle.terminate()
                assert bundle.wait() == 0, bundle.errors()
            assert "Sanitizer" not in bundle.errors(), bundle.errors()
    finally:
        for bundle in bundles:
            bundle.kill()


@pytest.fixture(scope="session")
def synth(tmp_path_factory):
    """synth(arch, option=value ...) gives the directory of a random model, made once."""
    made = {}

    def make(arch="qwen3_moe", **options):
        shape = {"hidden": 64, "layers": 3, "heads": 4, "kv_heads": 2, "experts": 8, "top_k": 2,
                 "intermediate": 48, "vocab": 384, "context": 512, "dtype": "f32"}
        shape.update(options)
        key = (arch, *sorted(shape.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("model") / arch
            args = [part for name, value in shape.items()
                    for part in ("--" + name.replace("_", "-"), value)]
            status, _, errors = run_tandem("synth", "--arch", arch, *args, made[key])
            assert status == 0, errors
        return made[key]

    return make


@pytest.fixture(scope="module")
def served(start, synth):
    """One attention and one FFN worker on a small model, shared by the tests of a module."""
    return start(synth())
