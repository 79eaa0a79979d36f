//! Attention over gathered rows: each rank holds a share of the keys and values of a context, gathers
//! those of all into a plane of keys and a plane of values, and computes
//! softmax(q · kᵀ / √32) · v from them. Rows arrive rank by rank, which attention does not care about.
//!
//! Run it: `cargo run --release --example 05-attention [FILE]`, with a safetensors file that holds `kv`
//! [rows, 384 + 384] in F16, `query` [n, 12, 32] in F32, and what is to be computed, `attention`
//! [n, 12, 32] in F32.

use direct_dcp::plan::{RowMap, Sharding};
use direct_dcp::{
    DType, FinalLayout, Group, KvGather, Planes, RowFormat, Rows, Workspace, WorkspaceOptions,
};
use safetensors::{Dtype, SafeTensors};
use std::error::Error;
use std::sync::Arc;
use std::{env, fs, thread};

type Failure = Box<dyn Error + Send + Sync>;

const EXAMPLE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../examples/data/minilm_kv_small.safetensors"
);
const HEADS: usize = 12;
/// Elements of a head.
const HEAD: usize = 32;
/// Elements of a row in each plane: keys, and values.
const WIDTH: usize = HEADS * HEAD;
const ROW: RowFormat = RowFormat::new(DType::F16, 2 * WIDTH);
/// How many neighbouring tokens go to one rank.
const INTERLEAVE: usize = 16;
/// What the result may be wrong by.
const TOLERANCE: f64 = 2e-3;

fn main() -> Result<(), Failure> {
    let path = env::args_os().nth(1).unwrap_or_else(|| EXAMPLE.into());
    let model = Arc::new(Model::read(&fs::read(path)?)?);
    for ranks in [2, 4, 8] {
        let threads: Vec<_> = Group::threads(ranks)?
            .into_iter()
            .map(|group| {
                let model = Arc::clone(&model);
                thread::spawn(move || rank(&group, &model))
            })
            .collect();
        let mut error = 0_f64;
        for thread in threads {
            error = error.max(thread.join().map_err(|_| "a rank panicked")??);
        }
        println!(
            "{ranks} ranks, {} rows, {} queries: max abs error {error:.1e}",
            model.rows(),
            model.queries()
        );
        if error > TOLERANCE {
            return Err(format!("the error is more than {TOLERANCE}").into());
        }
    }
    Ok(())
}

/// What one rank does. Returns the largest error of its share of the queries.
fn rank(group: &Group, model: &Model) -> Result<f64, Failure> {
    let (rank, ranks) = (group.rank(), group.world_size());
    let sharding = Sharding::new(ranks, INTERLEAVE)?;
    let padded = sharding.padded_rows(model.rows());

    // The rows of this rank. Padding is NaN, which would be seen in every result.
    let mut local = Vec::with_capacity(padded * ROW.row_bytes());
    for (token, row) in model.kv.chunks_exact(ROW.row_bytes()).enumerate() {
        if sharding.owner(token) == rank {
            local.extend_from_slice(row);
        }
    }
    local.resize(padded * ROW.row_bytes(), 0xFF);

    // One request, of which every rank contributes its padded shard from the first row on.
    let lens: Vec<usize> = (0..ranks)
        .map(|rank| sharding.local_len(model.rows(), rank))
        .collect();
    let map = RowMap::for_requests(&[padded], &[lens], &[0], rank)?;
    let layout = FinalLayout::new(&map, ROW, &[WIDTH, WIDTH])?;

    let workspace = Workspace::new(group, WorkspaceOptions::new(ranks * padded, ROW))?;
    let gather = KvGather::new(workspace);
    let planes = gather.gather_final(0, &Rows::dense(&local), &layout)?;
    let (keys, values) = (elements(&planes, 0), elements(&planes, 1));

    // The ranks share the queries; if there are more ranks than queries, some do the same.
    let mut error = 0_f64;
    let first = rank % model.queries();
    for index in (first..model.queries()).step_by(ranks) {
        for head in 0..HEADS {
            let at = index * WIDTH + head * HEAD;
            let result = attention(&model.query[at..at + HEAD], head, &keys, &values);
            for (found, &expected) in result.iter().zip(&model.attention[at..at + HEAD]) {
                let off = (found - f64::from(expected)).abs();
                // Of a number and NaN, `max` returns the number.
                error = error.max(if off.is_nan() { f64::INFINITY } else { off });
            }
        }
    }
    Ok(error)
}

/// softmax(q · kᵀ / √32) · v of one head.
fn attention(query: &[f32], head: usize, keys: &[f32], values: &[f32]) -> [f64; HEAD] {
    let columns = head * HEAD..(head + 1) * HEAD;
    let scores: Vec<f64> = keys
        .chunks_exact(WIDTH)
        .map(|row| {
            let products = row[columns.clone()].iter().zip(query);
            let dot: f64 = products.map(|(&k, &q)| f64::from(k) * f64::from(q)).sum();
            dot / (HEAD as f64).sqrt()
        })
        .collect();
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let (mut sum, mut result) = (0.0, [0.0; HEAD]);
    for (score, row) in scores.iter().zip(values.chunks_exact(WIDTH)) {
        let weight = (score - largest).exp();
        sum += weight;
        for (result, &value) in result.iter_mut().zip(&row[columns.clone()]) {
            *result += weight * f64::from(value);
        }
    }
    result.map(|element| element / sum)
}

/// The elements of a plane.
fn elements(planes: &Planes, index: usize) -> Vec<f32> {
    let bytes = planes.plane(index).unwrap_or_default();
    let words = bytes.chunks_exact(2).map(|word| [word[0], word[1]]);
    words.map(|word| half(u16::from_le_bytes(word))).collect()
}

/// The value of an F16.
fn half(bits: u16) -> f32 {
    let (exponent, mantissa) = (i32::from(bits >> 10 & 31), f32::from(bits & 1023));
    let value = match exponent {
        0 => mantissa * 2_f32.powi(-24),
        31 if mantissa > 0.0 => f32::NAN,
        31 => f32::INFINITY,
        _ => (1024.0 + mantissa) * 2_f32.powi(exponent - 25),
    };
    if bits >> 15 == 1 { -value } else { value }
}

/// The contents of a file.
struct Model {
    kv: Vec<u8>,
    query: Vec<f32>,
    attention: Vec<f32>,
}

impl Model {
    fn read(file: &[u8]) -> Result<Self, Failure> {
        let tensors = SafeTensors::deserialize(file)?;
        let data = |name: &str, dtype: Dtype, row: &[usize]| {
            let tensor = tensors.tensor(name)?;
            let rows = tensor.shape().split_first();
            match rows {
                Some((1.., shape)) if shape == row && tensor.dtype() == dtype => {
                    Ok(tensor.data().to_vec())
                }
                _ => Err(Failure::from(format!(
                    "{name} is not {dtype:?} [n, {row:?}]"
                ))),
            }
        };
        let floats = |name: &str| -> Result<Vec<f32>, Failure> {
            let data = data(name, Dtype::F32, &[HEADS, HEAD])?;
            let words = data.chunks_exact(4);
            let float = |word: &[u8]| f32::from_le_bytes([word[0], word[1], word[2], word[3]]);
            Ok(words.map(float).collect())
        };
        let model = Model {
            kv: data("kv", Dtype::F16, &[ROW.dim()])?,
            query: floats("query")?,
            attention: floats("attention")?,
        };
        match model.query.len() == model.attention.len() {
            true => Ok(model),
            false => Err("not as many queries as results".into()),
        }
    }

    fn rows(&self) -> usize {
        self.kv.len() / ROW.row_bytes()
    }

    fn queries(&self) -> usize {
        self.query.len() / WIDTH
    }
}
