"""See the package."""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.replay.replay import differences, record

if len(sys.argv) != 3 or sys.argv[1] not in ("record", "compare"):
    sys.exit("usage: python -m tests.replay record|compare FOLDER")
file = Path(sys.argv[2], "record.json").resolve()
with TemporaryDirectory() as work:
    found = record(Path(work).resolve())
if sys.argv[1] == "record":
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=1))
else:
    told = list(differences(json.loads(file.read_text()), json.loads(json.dumps(found))))
    print("\n".join(told) if told else "no difference")
    sys.exit(bool(told))
