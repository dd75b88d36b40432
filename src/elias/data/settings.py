"""Reading a file with the settings that a model's training data was read with."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elias.data.readers.detect import named_columns
from elias.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger(__name__)


def reading_options(
    path: str | Path, settings: Mapping[str, Any], given: Mapping[str, str | None]
) -> dict[str, str]:
    """Return the options to read a file or folder with: those given, else those recorded.

    Args:
        path: The file or folder to read.
        settings: How the training data was read, see `Elias.data_settings`.
        given: Values for ``text``, ``labels`` and ``separator`` that win; None: use the recorded
            one. Keys that are missing here are not looked up.

    Returns:
        Arguments of `load_corpus`. Nothing recorded applies to a format without named columns.
        A single recorded column that the file lacks is left out, with a warning, so that the
        reader looks for a column by its common names.

    Raises:
        DataError: If the file lacks one of several text columns.
    """
    place = Path(path).expanduser()
    options = {key: value for key, value in given.items() if value is not None}
    keys = [key for key in given if key not in options and settings.get(key) is not None]
    if not keys or not place.exists():  # the reader reports a missing file
        return options
    kind, names = named_columns(place)
    if kind == "lf":  # its labels are always in the same column
        keys = [key for key in keys if key == "text"]
    for key in keys if names else []:
        value: str = settings[key]
        parts = [value] if key != "text" or value in names else value.split(",")
        missing = [part.strip() for part in parts if part.strip() not in names]
        if key == "separator" or not missing:
            options[key] = value
        elif len(parts) > 1:
            raise DataError(
                f"{place}: no column {missing[0]!r}, and the model was trained on the columns "
                f"{value}; name those to read with {key}="
            )
        else:
            log.warning(
                "%s: no column %r, which the model was trained on; looking for a %s column by name",
                *(place, value, key),
            )
    return options
