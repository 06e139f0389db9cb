"""A memory in shards: each an ordinary saved memory, with a process of its own that attends to it, on one machine or many.

Attention over a union of sets is the merge of partial results, so a shard answers a query by (out, lse) over its own records,
or by its k best, and the joined answer is the one that a single memory gives.

    manifest.py     the folder: which shards, in what order their documents stand
    memory.py       ShardedMemory: documents, texts, places, removal; asks the shards through the next two
    context.py      what a memory layer sees: the cache's own records here, the shards' elsewhere
    processes.py    the shards' processes on Ray: started, asked, started again when they die
    worker.py       what runs in such a process

Reading into shards, which takes a model, is `model/parallel_reading.py`. Only `processes.py` knows of Ray, and it imports it
when the first shard is asked. Not covered: shard folders on disks that only one machine sees.
"""
