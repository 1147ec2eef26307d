//! The Python extension module `shardcore._core`: the only crate that names pyo3.
//!
//! Nothing is decided here. Arguments become Rust values, `gil::run` calls the pure crates without the GIL, and errors
//! become the classes of `shardcore.errors`.

mod action;
mod args;
mod checkpoint;
mod error;
mod gil;
mod host_memory;
mod io;
mod kernel_tensor;
mod kernels;
mod link;
mod numbers;
mod partition;
mod plan;
mod prefetch;
mod prefetch_args;
mod quantize;
mod reshard;
mod schedule;
mod schedule_args;
mod simulation;
mod swap;
mod synthesis;
mod tensor;

/// The Rust core of shardcore. Import its names from the rooms, such as ``shardcore.plan``.
#[pyo3::pymodule]
mod _core {
    #[pymodule_export]
    use crate::action::PyAction;
    #[pymodule_export]
    use crate::checkpoint::{
        PyCheckpointReader, PyCheckpointWriter, abandon_checkpoint, begin_checkpoint, checkpoint_aside,
        choose_checkpoint, commit_checkpoint, latest_checkpoint, list_checkpoints, verify_checkpoint,
    };
    #[pymodule_export]
    use crate::host_memory::{PyHostMemory, check_host_memory};
    #[pymodule_export]
    use crate::io::{PyIoEngine, PyIoHandle, PySwapFile};
    #[pymodule_export]
    use crate::kernels::{PyRule, PyStepTable, convert, sums_of_squares};
    #[pymodule_export]
    use crate::link::PyHostLink;
    #[pymodule_export]
    use crate::partition::{
        check_boundaries, from_megatron_layout, partition_layers, partition_marked, partition_uniform,
        to_megatron_layout,
    };
    #[pymodule_export]
    use crate::plan::{PyShardLayout, PyShardPlan, first_difference, groups, plan_shards, shard_layout};
    #[pymodule_export]
    use crate::prefetch::{PyPrefetchCoordinator, PyPrefetchPlan, prefetch};
    #[pymodule_export]
    use crate::quantize::{dequantize_tensors, quantization_block, quantize_tensors};
    #[pymodule_export]
    use crate::reshard::{reshard, share_writes};
    #[pymodule_export]
    use crate::schedule::{PyPipelineSchedule, evaluation_schedule, pipeline_schedule, schedule_names};
    #[pymodule_export]
    use crate::simulation::PySimulation;
    #[pymodule_export]
    use crate::swap::{place_tiles, plan_swap};
    #[pymodule_export]
    use crate::synthesis::{PySynthesis, synthesize};
}
