//! The caller's streams.

use std::sync::{Arc, Mutex, PoisonError};

use direct_dcp::cuda::{Context, Stream};
use pyo3::{Bound, PyAny, PyResult};

use crate::{errors, memory};

/// The number of a stream as Python has it.
pub(crate) fn raw(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    Ok(errors::count("stream", value)? as u64)
}

/// Streams of one context. It keeps the last one: the next call is mostly on the same.
pub(crate) struct Streams {
    context: Context,
    last: Mutex<Option<Arc<Stream>>>,
}

impl Streams {
    pub(crate) fn of(context: &Context) -> Self {
        Streams {
            context: context.clone(),
            last: Mutex::new(None),
        }
    }

    /// The stream that torch calls `raw`.
    pub(crate) fn get(&self, raw: u64) -> PyResult<Arc<Stream>> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        match &*last {
            Some(stream) if stream.as_raw() == raw => Ok(stream.clone()),
            _ => {
                let stream = memory::stream(&self.context, raw).map_err(errors::cuda)?;
                let stream = Arc::new(stream);
                *last = Some(stream.clone());
                Ok(stream)
            }
        }
    }
}
