"""See the package."""

import json
import sys
from pathlib import Path

from tests.replay.replay import differences, record

if len(sys.argv) != 3 or sys.argv[1] not in ("record", "compare"):
    sys.exit("usage: python -m tests.replay record|compare FOLDER")
work = Path(sys.argv[2]).resolve()
file = work / "record.json"
found = record(work)
if sys.argv[1] == "record":
    file.write_text(json.dumps(found, indent=1))
else:
    told = list(differences(json.loads(file.read_text()), json.loads(json.dumps(found))))
    print("\n".join(told) if told else "no difference")
    sys.exit(bool(told))
