"""Label a table of texts on a Spark cluster. Each Python process loads the model once.

python examples/spark_batch.py MODEL articles.parquet labels
"""

import argparse
from collections.abc import Iterator
from functools import cache

import pandas as pd
from pyspark.sql import SparkSession
from pyspark.sql.types import ArrayType, FloatType, StringType, StructType

from elias import Elias


@cache
def load(model: str) -> Elias:
    """Load a model, once per process: Spark uses a process for many partitions."""
    return Elias.from_pretrained(model)


def label(batches: Iterator[pd.DataFrame], model: str, top_k: int) -> Iterator[pd.DataFrame]:
    """Yield the batches of a partition with their labels and scores, best first."""
    for batch in batches:
        rankings = list(load(model).predict(batch["text"].tolist(), top_k=top_k))
        yield batch.assign(
            labels=[ranking.labels for ranking in rankings],
            scores=[ranking.scores.tolist() for ranking in rankings],
        )


def main() -> None:
    """Read the texts, label them and write the result, all in parallel."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="folder that all nodes can read, or a model on the hub")
    parser.add_argument("texts", help="Parquet file or folder with a column `text`")
    parser.add_argument("out", help="folder for the Parquet files of the result")
    parser.add_argument("--top-k", type=int, default=5)
    args = parser.parse_args()
    spark = SparkSession.builder.appName("elias").getOrCreate()
    # Send this file to the workers. They import it, and thus keep `load` from task to task.
    spark.sparkContext.addPyFile(__file__)
    from spark_batch import label

    texts = spark.read.parquet(args.texts)
    columns = StructType(list(texts.schema.fields))
    columns.add("labels", ArrayType(StringType())).add("scores", ArrayType(FloatType()))
    texts.mapInPandas(
        lambda batches: label(batches, args.model, args.top_k), columns
    ).write.parquet(args.out)
    spark.stop()


if __name__ == "__main__":
    main()
