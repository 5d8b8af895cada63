//! A module on the GPU: images that the driver has loaded, and the kernels in them.

use std::any::Any;
use std::collections::HashMap;
use std::ffi::CString;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex};

use cudarc::driver::sys::{CUfunction, CUfunction_attribute_enum as FunctionAttribute, CUmodule};

use super::context::Context;
use super::driver::{Raw, SUCCESS};
use crate::build_support::kernel_names;
use crate::embedded::{self, SOURCES};
use crate::error::{DeviceError, Result, list};
use crate::executor::LoadedModule;
use crate::lock::lock;

const NOT_FOUND: u32 = 500;
/// Dynamic shared memory that every kernel may have without cuFuncSetAttribute.
const SHARED_UNASKED: u32 = 48 << 10;

/// A kernel that has been loaded.
pub(super) struct Function {
    pub(super) raw: Raw<CUfunction>,
    /// Bytes of parameters, where the driver reports them or our own tables do.
    pub(super) params: Option<u32>,
    /// The dynamic shared memory that the function has been allowed so far.
    shared: Mutex<u32>,
}

/// A module that the driver has loaded.
pub(super) struct CudaModule {
    name: String,
    pub(super) context: Arc<Context>,
    /// The modules, each with its source's kernels where these are known: asking a module for a
    /// kernel that it does not have counts as an error in compute-sanitizer.
    modules: Vec<(Raw<CUmodule>, Option<Vec<String>>)>,
    /// Whether these are the project's own kernels, whose sizes of parameters are known.
    embedded: bool,
    functions: Mutex<HashMap<String, Arc<Function>>>,
}

impl CudaModule {
    /// Loads the images, and the code of every kernel known by name.
    ///
    /// Kernels are loaded now rather than at their first launch, because loading then would wait
    /// for whatever runs on the device.
    pub(super) fn load(
        context: &Arc<Context>,
        name: &str,
        images: &[(String, Vec<u8>)],
        known: &[String],
        embedded: bool,
    ) -> Result<Arc<Self>> {
        let current = context.current()?;
        let mut module = Self {
            name: name.to_owned(),
            context: context.clone(),
            modules: Vec::new(),
            embedded,
            functions: Mutex::default(),
        };
        for (image_name, image) in images {
            // The driver reads the header as 8-byte words.
            let mut aligned = vec![0u128; image.len() / 16 + 1];
            // SAFETY: the copy is at least as long as the image; both are plain bytes.
            unsafe {
                aligned.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(image.as_ptr(), image.len())
            };
            let mut raw = null_mut();
            // SAFETY: a whole cubin or fatbin, whose header says its length, or PTX, which ends with a zero byte: the copy is
            // longer than the image and zero behind it. A user's image was checked to hold all that its headers name.
            let code = unsafe { (context.driver.cuModuleLoadData)(&mut raw, aligned.as_ptr().cast()) };
            context.check("cuModuleLoadData", code, || {
                format!("loading {image_name} ({} bytes)", image.len())
            })?;
            let source = SOURCES.iter().find(|(name, _)| embedded && image_name.starts_with(name));
            module.modules.push((Raw(raw), source.map(|(_, text)| kernel_names(text))));
        }
        for kernel in known {
            match module.find(kernel) {
                // The name stands in a comment or behind an #if, so the module need not have such a
                // kernel.
                Ok(_) | Err(DeviceError::UnknownKernel { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        drop(current);
        Ok(Arc::new(module))
    }

    /// Finds a kernel in the modules. The context must be current.
    pub(super) fn find(&self, kernel: &str) -> Result<Arc<Function>> {
        let mut functions = lock(&self.functions);
        if let Some(found) = functions.get(kernel) {
            return Ok(found.clone());
        }
        let unknown = |functions: &HashMap<String, Arc<Function>>| {
            let mut known: Vec<String> = functions.keys().cloned().collect();
            known.sort();
            DeviceError::UnknownKernel {
                kernel: kernel.to_owned(),
                module: self.name.clone(),
                known: list(&known),
            }
        };
        let Ok(c_name) = CString::new(kernel) else { return Err(unknown(&functions)) };
        let driver = self.context.driver;
        for (module, names) in &self.modules {
            if names.as_ref().is_some_and(|names| !names.iter().any(|name| name == kernel)) {
                continue;
            }
            let mut raw = null_mut();
            // SAFETY: a valid module and a C string; writes one handle.
            let code = unsafe { (driver.cuModuleGetFunction)(&mut raw, module.0, c_name.as_ptr()) };
            if code == NOT_FOUND {
                continue;
            }
            let doing = || format!("loading kernel `{kernel}` of {}", self.name);
            self.context.check("cuModuleGetFunction", code, doing)?;
            self.load_now(raw, doing)?;
            let params =
                self.params_size(raw).or_else(|| embedded::params_size(kernel).filter(|_| self.embedded));
            let function = Arc::new(Function { raw: Raw(raw), params, shared: Mutex::new(SHARED_UNASKED) });
            functions.insert(kernel.to_owned(), function.clone());
            return Ok(function);
        }
        Err(unknown(&functions))
    }

    /// Loads one kernel's code now; the driver would otherwise load it lazily.
    fn load_now(&self, function: CUfunction, doing: impl Fn() -> String) -> Result<()> {
        let driver = self.context.driver;
        if let Some(load) = driver.cuFuncLoad {
            // SAFETY: a valid function.
            return self.context.check("cuFuncLoad", unsafe { load(function) }, doing);
        }
        let mut registers = 0;
        let which = FunctionAttribute::CU_FUNC_ATTRIBUTE_NUM_REGS;
        // SAFETY: a valid function; writes one int. To answer, the driver must have loaded the
        // code.
        let code = unsafe { (driver.cuFuncGetAttribute)(&mut registers, which, function) };
        self.context.check("cuFuncGetAttribute", code, doing)
    }

    /// The size of the kernel's parameter struct in bytes, if the driver can tell.
    fn params_size(&self, function: CUfunction) -> Option<u32> {
        let ask = self.context.driver.cuFuncGetParamInfo?;
        let (mut offset, mut size) = (0, 0);
        // SAFETY: a valid function; writes two sizes, or fails. A kernel here takes one struct;
        // asking for a second parameter would be an error.
        let code = unsafe { ask(function, 0, &mut offset, &mut size) };
        (code == SUCCESS).then(|| u32::try_from(offset + size).ok())?
    }

    /// How many blocks of this shape fit on the idle device at once. The context must be current.
    pub(super) fn resident_blocks(
        &self,
        kernel: &str,
        function: &Function,
        block: u32,
        shared: u32,
    ) -> Result<u32> {
        self.allow_shared(kernel, function, shared)?;
        let mut per_processor = 0;
        // SAFETY: a valid function; writes one int.
        let code = unsafe {
            (self.context.driver.cuOccupancyMaxActiveBlocksPerMultiprocessor)(
                &mut per_processor,
                function.raw.0,
                block as i32,
                shared as usize,
            )
        };
        self.context.check("cuOccupancyMaxActiveBlocksPerMultiprocessor", code, || {
            format!("asking how many blocks of {block} threads kernel `{kernel}` may have")
        })?;
        Ok(per_processor.max(0) as u32 * self.context.processors)
    }

    /// Lets the kernel have `shared` bytes of dynamic shared memory from now on.
    pub(super) fn allow_shared(&self, kernel: &str, function: &Function, shared: u32) -> Result<()> {
        let mut allowed = lock(&function.shared);
        if shared <= *allowed {
            return Ok(());
        }
        let which = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: a valid function.
        let code = unsafe { (self.context.driver.cuFuncSetAttribute)(function.raw.0, which, shared as i32) };
        self.context.check("cuFuncSetAttribute", code, || {
            format!("allowing kernel `{kernel}` {shared} bytes of dynamic shared memory")
        })?;
        *allowed = shared;
        Ok(())
    }
}

impl LoadedModule for CudaModule {
    fn name(&self) -> &str {
        &self.name
    }

    fn kernels(&self) -> Vec<String> {
        let mut names: Vec<String> = lock(&self.functions).keys().cloned().collect();
        names.sort();
        names
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for CudaModule {
    fn drop(&mut self) {
        let Ok(_current) = self.context.current() else { return };
        for (module, _) in &self.modules {
            // SAFETY: loaded by this value; each launch of its kernels held an Arc of it until the
            // launch had ended.
            let code = unsafe { (self.context.driver.cuModuleUnload)(module.0) };
            self.context.note("cuModuleUnload", code, || format!("unloading {}", self.name));
        }
    }
}
