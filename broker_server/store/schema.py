"""The tables of the store, in SQLAlchemy Core, as this version has them, and the marks that tell a database's version.

How a database of an older version becomes this one: `broker_server.store.migrations`.
"""

from sqlalchemy import Boolean, Column, Float, ForeignKeyConstraint, Index, Integer, MetaData, String, Table, Text

SCHEMA_VERSION = 4  # of the newest file in migrations/versions

metadata = MetaData()

# What Alembic wrote last; the table is its own.
mark = Table("alembic_version", MetaData(), Column("version_num", String(32), nullable=False)).c.version_num

# The mark from before Shoal used Alembic. It stays at 3, so that a Shoal that reads it alone refuses the store.
old_mark = Table("shoal_store", metadata, Column("schema_version", Integer, nullable=False)).c.schema_version

runs = Table(
    "runs",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("fleet", String(64), nullable=False),
    Column("arch", String(128), nullable=False),
    Column("config", Text, nullable=False),  # FleetConfig as JSON, paths absolute
    Column("status", String(16), nullable=False),  # running, paused, finished, failed, stopped
    Column("detail", Text),
    Column("created_at", Float, nullable=False),  # seconds since the epoch, as all times here
    Column("ended_at", Float),
    Column("wire_bytes", Integer, nullable=False, default=0),
    Column("payload_bytes", Integer, nullable=False, default=0),
)

devices = Table(
    "devices",
    metadata,
    Column("fleet", String(64), primary_key=True),
    Column("id", String(64), primary_key=True),
    Column("online", Boolean, nullable=False),
    Column("state", String(64), nullable=False),
    Column("profile", Text),  # Profile as JSON
    Column("first_seen_at", Float, nullable=False),
    Column("last_seen_at", Float, nullable=False),
)

rounds = Table(
    "rounds",
    metadata,
    Column("run", String(64), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("state", String(16), nullable=False),
    Column("version", Integer, nullable=False),  # the global version it starts from
    Column("quorum", Integer, nullable=False),
    Column("reason", Text),
    Column("planned_at", Float, nullable=False),
    Column("opened_at", Float),
    Column("ended_at", Float),
    Column("evaluation", Text),  # VersionEvaluation as JSON
    Column("note", Text),
    Column("wanted", Integer),  # updates; more devices may be asked
    Column("ending", String(16)),  # the event that ended the collecting
    Column("collect_seconds", Float),
    Column("left_out", Text),  # LeftOut as JSON
    ForeignKeyConstraint(["run"], ["runs.id"]),
)

tasks = Table(
    "tasks",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("run", String(64), nullable=False),
    Column("round", Integer, nullable=False),
    Column("device", String(64), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("tier", String(32), nullable=False),
    Column("plan_key", String(128), nullable=False),
    Column("version", Integer, nullable=False),  # the global version its weights were cut from
    Column("artifact_set", Text, nullable=False),  # BlobRef as JSON
    Column("weights", Text, nullable=False),  # BlobRef as JSON
    Column("phase", String(16), nullable=False),
    Column("detail", Text),
    Column("update_digest", String(64)),
    Column("update_size", Integer),
    Column("metrics", Text),  # TaskMetrics as JSON
    Column("received_at", Float),
    Column("others", Text),  # Alternatives as JSON
    Column("timing", Text),  # Timing as JSON
    Column("screening", Text),  # Screening as JSON
    ForeignKeyConstraint(["run", "round"], ["rounds.run", "rounds.number"]),
    Index("tasks_by_round", "run", "round"),
)

versions = Table(
    "versions",
    metadata,
    Column("run", String(64), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("round", Integer, nullable=False),  # that made it; 0 for the initial weights
    Column("digest", String(64), nullable=False),
    Column("state_digest", String(64)),  # of the server optimizer
    Column("statistics_digest", String(64)),  # static batch norm
    Column("created_at", Float, nullable=False),
    Column("evaluation", Text),  # VersionEvaluation as JSON
    ForeignKeyConstraint(["run"], ["runs.id"]),
)

events = Table(
    "events",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("at", Float, nullable=False),
    Column("run", String(64)),
    Column("round", Integer),
    Column("device", String(64)),
    Column("kind", String(32), nullable=False),
    Column("detail", Text, nullable=False),
    Index("events_by_run", "run", "id"),
)

refusals = Table(
    "refusals",
    metadata,
    Column("run", String(64), primary_key=True),  # empty outside a run
    Column("device", String(64), primary_key=True),  # empty where it is not known
    Column("reason", String(32), primary_key=True),
    Column("by", String(8), primary_key=True),  # server or device
    Column("count", Integer, nullable=False),
)
