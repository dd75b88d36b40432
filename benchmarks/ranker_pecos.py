"""Run the PECOS side of `ranker.py`, with the interpreter of an environment that has PECOS.

    python ranker_pecos.py PROBLEM_FOLDER THREADS

Reads the problem that `ranker.py` wrote, trains PECOS's masked linear model on it once, and writes
its weights to the same folder. The last line of output is JSON.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import scipy.sparse as sp
from pecos.xmc.base import MLModel, MLProblem


def main(folder, n_threads):
    settings = json.loads((folder / "settings.json").read_text())
    features = sp.load_npz(folder / "features.npz")
    dense = np.load(folder / "dense.npy")
    labels = sp.load_npz(folder / "labels.npz").tocsc()
    mask = sp.load_npz(folder / "mask.npz").tocsc()
    points = sp.hstack([features, sp.csr_matrix(dense)], format="csr", dtype=np.float32)
    one_code_for_each_label = sp.identity(labels.shape[1], dtype=np.float32, format="csc")
    problem = MLProblem(points, labels, C=one_code_for_each_label, M=mask)
    parameters = MLModel.TrainParams(
        solver_type="L2R_L2LOSS_SVC_DUAL",
        Cp=settings["cost"],
        Cn=settings["cost"],
        eps=settings["tolerance"],
        max_iter=settings["max_iterations"],
        threshold=settings["prune"],
        bias=1.0,
        threads=n_threads,
    )

    cpu, wall = time.process_time(), time.perf_counter()
    model = MLModel.train(problem, train_params=parameters)
    timed = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}

    weights = sp.csr_matrix(model.W.T)
    sp.save_npz(folder / "pecos.npz", weights, compressed=False)
    print(json.dumps(timed | {"weights": int(weights.nnz)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
