"""Any layer of any PyTorch model, over HTTP.

``layertap.models`` and ``layertap.service`` are the folders of these names at the top of the project, linked here: what
is imported has a name of its own, so that a user's packages called ``models`` or ``service`` never meet them.
"""

from pathlib import Path

for _name in ("models", "service"):
    if not (Path(__file__).parent / _name).is_dir():
        raise ImportError(
            f"src/layertap/{_name} is no link to the folder {_name}: this checkout was made without symbolic links "
            "(git config core.symlinks true && git checkout -- src), which Linux and macOS have"
        )
