"""The paper's figures from a run, and the report that shows them; on top of the pipeline."""
