"""Every format a corpus may come in, one module for each family.

| format | what it is | module |
| --- | --- | --- |
| ``jsonl``, ``csv``, ``tsv``, ``parquet`` | a table, or one for each split | `tabular` |
| ``folder`` | ``raw/trn_X.txt`` + ``Y.trn.npz`` | `folder` |
| ``pecos`` | ``X.trn.txt`` + ``Y.trn.npz``; or ``ids<tab>text`` lines | `folder`, `pecos` |
| ``xmc`` | ``N D L`` sparse text; ``trn_X_Y.txt`` | `xmc` |
| ``lf`` | ``trn.json.gz`` + ``lbl.json.gz`` | `lf` |

The first line with something on it decides what a text file is; its name does not matter.
"""
