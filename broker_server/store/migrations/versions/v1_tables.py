"""Version 1: runs, devices, rounds, tasks, global versions, the log and the refusals."""

from alembic import op
from sqlalchemy import Boolean, Column, Float, ForeignKeyConstraint, Integer, PrimaryKeyConstraint, String, Text

revision = "1"
down_revision = None


def upgrade() -> None:
    """Make the tables in an empty database."""
    op.create_table("shoal_store", Column("schema_version", Integer, nullable=False))
    op.execute("INSERT INTO shoal_store (schema_version) VALUES (1)")
    op.create_table(
        "runs",
        Column("id", String(64), primary_key=True),
        Column("fleet", String(64), nullable=False),
        Column("arch", String(128), nullable=False),
        Column("config", Text, nullable=False),
        Column("status", String(16), nullable=False),
        Column("detail", Text),
        Column("created_at", Float, nullable=False),
        Column("ended_at", Float),
        Column("wire_bytes", Integer, nullable=False),
        Column("payload_bytes", Integer, nullable=False),
    )
    op.create_table(
        "devices",
        Column("fleet", String(64), nullable=False),
        Column("id", String(64), nullable=False),
        Column("online", Boolean, nullable=False),
        Column("state", String(64), nullable=False),
        Column("profile", Text),
        Column("first_seen_at", Float, nullable=False),
        Column("last_seen_at", Float, nullable=False),
        PrimaryKeyConstraint("fleet", "id"),
    )
    op.create_table(
        "rounds",
        Column("run", String(64), nullable=False),
        Column("number", Integer, nullable=False),
        Column("state", String(16), nullable=False),
        Column("version", Integer, nullable=False),
        Column("quorum", Integer, nullable=False),
        Column("reason", Text),
        Column("planned_at", Float, nullable=False),
        Column("opened_at", Float),
        Column("ended_at", Float),
        Column("evaluation", Text),
        Column("note", Text),
        PrimaryKeyConstraint("run", "number"),
        ForeignKeyConstraint(["run"], ["runs.id"]),
    )
    _make_tasks()
    op.create_table(
        "versions",
        Column("run", String(64), nullable=False),
        Column("number", Integer, nullable=False),
        Column("round", Integer, nullable=False),
        Column("digest", String(64), nullable=False),
        Column("state_digest", String(64)),
        Column("statistics_digest", String(64)),
        Column("created_at", Float, nullable=False),
        Column("evaluation", Text),
        PrimaryKeyConstraint("run", "number"),
        ForeignKeyConstraint(["run"], ["runs.id"]),
    )
    op.create_table(
        "events",
        Column("id", Integer, primary_key=True, autoincrement=True),
        Column("at", Float, nullable=False),
        Column("run", String(64)),
        Column("round", Integer),
        Column("device", String(64)),
        Column("kind", String(32), nullable=False),
        Column("detail", Text, nullable=False),
    )
    op.create_index("events_by_run", "events", ["run", "id"])
    op.create_table(
        "refusals",
        Column("run", String(64), nullable=False),
        Column("device", String(64), nullable=False),
        Column("reason", String(32), nullable=False),
        Column("by", String(8), nullable=False),
        Column("count", Integer, nullable=False),
        PrimaryKeyConstraint("run", "device", "reason", "by"),
    )


def _make_tasks() -> None:
    op.create_table(
        "tasks",
        Column("id", String(64), primary_key=True),
        Column("run", String(64), nullable=False),
        Column("round", Integer, nullable=False),
        Column("device", String(64), nullable=False),
        Column("kind", String(16), nullable=False),
        Column("tier", String(32), nullable=False),
        Column("plan_key", String(128), nullable=False),
        Column("version", Integer, nullable=False),
        Column("artifact_set", Text, nullable=False),
        Column("weights", Text, nullable=False),
        Column("phase", String(16), nullable=False),
        Column("detail", Text),
        Column("update_digest", String(64)),
        Column("update_size", Integer),
        Column("metrics", Text),
        Column("received_at", Float),
        ForeignKeyConstraint(["run", "round"], ["rounds.run", "rounds.number"]),
    )
    op.create_index("tasks_by_round", "tasks", ["run", "round"])
