"""What a killed process has left of an upload."""

import io
import os
import time

from starlette.datastructures import UploadFile

from kvweave.server.uploads import index, upload_folder
from support.tiny_kb import load, open_tiny

DEAD = ".tmp-4194304999-abcdef01"  # no process has this number


def test_what_a_killed_upload_has_left_goes_with_the_next_one(tmp_path):
    undo = load()
    try:
        with open_tiny(tmp_path / "home") as base:
            folder = upload_folder(base)
            aside, young = folder / f"a.txt{DEAD}", folder / f"b.txt{DEAD}"
            aside.mkdir(parents=True)
            (aside / "a.txt").write_text("removed since")
            young.write_text("perhaps of another container")
            (folder / "c.txt").write_text("The river is in the north.")
            os.utime(aside, (time.time() - 120,) * 2)
            index(base, [UploadFile(io.BytesIO(b"The bridge is old."), filename="d.txt")], lambda event: None)
            assert {path.name for path in folder.iterdir()} == {young.name, "c.txt", "d.txt"}
    finally:
        undo()
