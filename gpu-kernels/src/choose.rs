//! The choice of an executor: which kinds this host has, and which one a program gets.

use std::sync::Arc;

use crate::cpu::CpuExecutor;
use crate::cuda::{self, CudaExecutor};
use crate::error::{DeviceError, Result};
use crate::executor::Executor;

/// The kind of device to choose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// A GPU if one is usable, otherwise the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// A GPU; fails if none is usable.
    Cuda,
}

/// A kind of executor, and whether this host has it.
#[derive(Clone, Debug)]
pub struct Available {
    /// The executor's kind: "cpu" or "cuda".
    pub name: &'static str,
    /// The device that it would run on, or why there is none.
    pub state: std::result::Result<String, String>,
}

/// Lists every kind of executor, with the reason for each that this host lacks. Makes no CUDA
/// context.
pub fn available_executors() -> Vec<Available> {
    let cuda = cuda::probe().map(|info| info.to_string());
    vec![
        Available { name: "cuda", state: cuda },
        Available { name: "cpu", state: Ok(CpuExecutor::new().describe()) },
    ]
}

/// Opens an executor on device 0; also returns a sentence that says which one and why.
pub fn choose(device: DeviceChoice) -> Result<(Arc<dyn Executor>, String)> {
    choose_at(device, 0)
}

/// Opens an executor, on GPU `index` if it is a GPU.
pub fn choose_at(device: DeviceChoice, index: u32) -> Result<(Arc<dyn Executor>, String)> {
    let cpu = |why: String| -> (Arc<dyn Executor>, String) {
        let executor = CpuExecutor::new();
        let sentence = format!("cpu: {}, {why}", executor.describe());
        (Arc::new(executor), sentence)
    };
    match device {
        DeviceChoice::Cpu => Ok(cpu("as asked for".to_owned())),
        DeviceChoice::Cuda => {
            let executor = CudaExecutor::new(index)?;
            let sentence = format!("cuda: {}, as asked for", executor.describe());
            Ok((Arc::new(executor), sentence))
        }
        DeviceChoice::Auto => match CudaExecutor::new(index) {
            Ok(executor) => {
                let sentence = format!("cuda: {}, because a usable GPU was found", executor.describe());
                Ok((Arc::new(executor), sentence))
            }
            Err(DeviceError::CudaUnavailable { reason }) => {
                Ok(cpu(format!("because CUDA is unavailable: {reason}")))
            }
            Err(error @ DeviceError::UnfitDevice { .. }) => Ok(cpu(format!("because {error}"))),
            // A GPU that is present and fails is an error; the slow CPU does not silently replace
            // it.
            Err(error) => Err(error),
        },
    }
}
