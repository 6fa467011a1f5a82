import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["KVWEAVE_HOME"] = "/nonexistent/tests-name-their-own-home"
