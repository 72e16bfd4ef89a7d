"""Write the JSON schema of exported explanations to ``assets/schema/``."""

from __future__ import annotations

import json
from pathlib import Path

from backend.io.schema import SCHEMA_VERSION, SaliencyJson


def main() -> None:
    """Write the file and say where."""
    target = Path(__file__).resolve().parent.parent / "assets" / "schema" / f"token_saliency.v{SCHEMA_VERSION}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(SaliencyJson.model_json_schema(), indent=1) + "\n")
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
