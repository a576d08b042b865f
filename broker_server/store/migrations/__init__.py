"""The migrations that upgrade a store of an older version.

`broker_server.store.opening` runs them.

To change the schema: store a fixture of the present version (see
``tests/broker_server/fixtures/README.md``), change the record and the ``SCHEMA_VERSION`` of
`broker_server.store.schema`, and add ``versions/v<number>_<what>.py`` whose ``upgrade`` makes the
same change to an existing database. A test compares the two. The JSON in a column belongs to the
schema as well: if a key is renamed or removed, a migration must rewrite the rows.
"""
