"""Label a table of texts on a Ray cluster. Each actor loads the model once.

python examples/ray_batch.py MODEL articles.parquet labels --actors 15
"""

import argparse

import pandas as pd
import ray

from elias import Elias


class Labeller:
    """Label batches of texts with a model that is loaded when the actor starts."""

    def __init__(self, model: str, top_k: int) -> None:
        self.model = Elias.from_pretrained(model)
        self.top_k = top_k

    def __call__(self, batch: pd.DataFrame) -> pd.DataFrame:
        """Return the batch with its labels and their scores, best first."""
        rankings = list(self.model.predict(batch["text"].tolist(), top_k=self.top_k))
        return batch.assign(
            labels=[ranking.labels for ranking in rankings],
            scores=[ranking.scores.tolist() for ranking in rankings],
        )


def main() -> None:
    """Read the texts, label them and write the result, all in parallel."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="folder that all nodes can read, or a model on the hub")
    parser.add_argument("texts", help="Parquet file or folder with a column `text`")
    parser.add_argument("out", help="folder for the Parquet files of the result")
    parser.add_argument("--actors", type=int, default=1, help="leave a core to reading")
    parser.add_argument("--top-k", type=int, default=5)
    args = parser.parse_args()
    ray.data.read_parquet(args.texts).map_batches(
        Labeller,
        fn_constructor_args=(args.model, args.top_k),
        compute=ray.data.ActorPoolStrategy(size=args.actors),
        num_cpus=1,  # of each actor; with num_gpus=1, it uses a GPU
        batch_size=1024,
        batch_format="pandas",
    ).write_parquet(args.out)


if __name__ == "__main__":
    main()
