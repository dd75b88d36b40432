"""Readers of corpus formats.

| format | module |
| --- | --- |
| JSON lines, CSV, TSV, Excel, fastText, corpora of Annif | `table` |
| Parquet, tables in memory | `table`, which gets the rows from `parquet` |
| formats of the XMC repository and of PECOS | `xmc` |
| label tables, vocabularies in SKOS | `label_table` |

`base` has the interface of a reader, `files` opens and decodes files, `columns` chooses the columns
of a table, and `label_cells` parses the cells of label columns.
"""
