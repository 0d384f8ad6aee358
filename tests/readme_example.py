"""The Python of README.md. Run as a script, it prints the first example."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def readme_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.M | re.S)


if __name__ == "__main__":
    print(readme_blocks()[0])
