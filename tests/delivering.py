"""Waiting for what MLflow gets on a thread of its own."""

from __future__ import annotations

import threading

from penstock.session.session import Training
from penstock.trackers.mlflow_outbox import Delivery, Outbox


def with_outbox(training: Training) -> Training:
    """Begin to deliver what the training records, to its MLflow run."""
    session = training.session()
    session.outbox = Outbox(Delivery(session.tracking_uri, session.mlflow_run_id))
    return training


def await_delivery(training: Training) -> None:
    """Wait until MLflow has all that was recorded."""
    outbox, done = training.session().outbox, threading.Event()
    assert outbox is not None
    outbox.put("nothing more", done.set)
    assert done.wait(60)
