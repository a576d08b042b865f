"""Version 3: the oldest version that is supported.

Its tables are in ``tests/broker_server/fixtures/store-v3.sql``.
"""

revision = "3"
down_revision = None
